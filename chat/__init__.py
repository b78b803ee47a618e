"""The domain of the chat service, shared by Lambdas and containers. It knows no framework."""
