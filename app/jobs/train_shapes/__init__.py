"""Training of wan-shapes, the small Wan model that ships with worldstage.

`scene` and `grammar` (what a clip shows and how it is said) import neither torch nor Ray, so that any test may draw
prompts from them. `python -m app.jobs.train_shapes --help` lists the training stages.
"""
