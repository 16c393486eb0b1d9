"""The commands of ``mpinspect``, a file each: ``add_options`` declares its options, ``run`` returns the exit status."""
