"""What a function means: the fingerprint that makes its version."""
