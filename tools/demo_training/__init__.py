# Trains the demo model: `python -m tools.demo_training.train`.
