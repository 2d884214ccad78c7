# Training of the models that ship with Tollgate; run by hand, not in the wheel.
