# LoRA adapters (Hu et al. 2021): read, kept on the device, and added to a model's products row by row.
