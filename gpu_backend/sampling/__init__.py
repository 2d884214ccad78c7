# Logits to tokens: sampler, adjustments, verification of draft tokens.
