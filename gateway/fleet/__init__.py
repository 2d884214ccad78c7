# Replicas of the engine: watched, sampled for their cost, asked how much they bear.
