# A worker's part in batches: claims items, runs them through the pipeline, stores the results.
