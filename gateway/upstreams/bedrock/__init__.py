# The wire format of Amazon Bedrock.
