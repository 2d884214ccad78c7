# What is known of the field's models: list prices, output limits, generations of Claude and Gemini.
