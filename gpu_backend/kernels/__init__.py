# Every operation of a forward pass: one place that chooses, and plain torch to judge by.
