"""What the server's endpoints take, as pydantic models."""
