"""EAGLE-3: one decoder layer on the target's own hidden states."""
