"""The ranks of a tensor-parallel model: who they are, what they send, how they end.

team.py starts them and knows who is lost; link.py moves bytes. Neither knows of models.
"""
