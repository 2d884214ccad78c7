# A worker's part in batches: claims items, runs them through the pipeline, keeps what came.
