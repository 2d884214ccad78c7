# The held-back share: some calls that a small model answered are asked of a large one too, and compared; where a route
# explores, some that a large model answered are asked of a small one.
