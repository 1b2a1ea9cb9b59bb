"""ReDrafter: a recurrent network and beam search on the target."""
