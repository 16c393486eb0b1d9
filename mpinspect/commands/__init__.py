"""The commands of ``mpinspect``, one per file: ``add_options`` declares options, ``run`` returns the exit status."""
