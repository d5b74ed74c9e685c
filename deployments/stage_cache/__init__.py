"""The step cache of a pipeline stage: which steps reuse, what is predicted instead, and how it is known to be safe."""
