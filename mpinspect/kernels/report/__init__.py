"""What a KernelReport says, in every form."""
