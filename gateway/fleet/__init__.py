# Replicas of the engine: watched, sampled for their cost, sized by their reports.
