// Empty: a target needs a source to have a precompiled header that others reuse.
