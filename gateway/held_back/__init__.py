# The held-back share: some calls that a small model answered are asked of a large one too, and compared.
