# The step loop and the process that owns the device.
