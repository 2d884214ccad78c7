# What a device can do and hold: bandwidth, rooflines, step costs, memory.
