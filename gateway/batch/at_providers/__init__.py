# Lines of batches on their way through Batch APIs: what they are there, who holds what for them, where they wait.
