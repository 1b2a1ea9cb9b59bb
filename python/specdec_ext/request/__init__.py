"""What a request asks for, and its checks; all before any work, and without torch."""
