"""Which stored functions may run: claims, the keys that sign them, and the policy that decides."""
