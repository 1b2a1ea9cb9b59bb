"""An earlier commit of this package, in an environment of its own below build/base."""
