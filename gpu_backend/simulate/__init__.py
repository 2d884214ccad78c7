# The engine without a device: the real scheduler, block manager and step loop under a virtual clock.
