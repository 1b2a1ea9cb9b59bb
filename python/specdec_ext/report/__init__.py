"""Result files as pictures, and one request step by step."""
