"""What ``persia-launcher doctor`` looks at: the machine, the network, the settings, the data.

Each check returns findings. None raises for what it finds, and each wait has a deadline.
"""
