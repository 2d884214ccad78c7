# Slots of targets, fair queues before them, memory for long bodies. Pure.
