"""What the commands of ``mpinspect`` do, one file each: its options, and its run, which returns the exit status."""
