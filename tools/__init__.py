# Training of the models that ship with Tollgate, and experiments on the simulator; run by hand, not in the wheel.
