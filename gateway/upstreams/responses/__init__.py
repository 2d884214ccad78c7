# OpenAI's Responses API as a wire format: requests of that API reach an upstream that has it as they came.
