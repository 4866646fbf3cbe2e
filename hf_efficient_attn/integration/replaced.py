"""The methods of transformers that importing this package replaces, and the reason for each.

A method is replaced only if a subclass, a registration (Auto classes, attention interfaces) or a callback cannot do the
same. For models and configs without a pattern, these methods give the same results as before;
`tests/integration/test_replaced.py` compares the results with those of a process that has not imported this package.
"""

# the method of transformers → why it is replaced
REPLACED: dict[str, str] = {
    "PreTrainedModel.__init__": (
        "Every model that is built or loaded calls it: models on attn_implementation='efficient' get the hooks that "
        "refuse a model that cannot follow its pattern (integration/guard.py)."
    ),
    "PreTrainedModel.set_attn_implementation": "It switches an existing model to 'efficient' (integration/guard.py).",
    "PreTrainedModel.post_init": (
        "It is the last step before weights are loaded: models whose config has indexers get them "
        "(models/indexed/index_model.py)."
    ),
    "PreTrainedModel.from_pretrained": (
        "It makes all weights trainable, also those that are frozen in the stage of an indexer "
        "(models/indexed/index_model.py)."
    ),
    "PreTrainedConfig.to_dict": (
        "All code that saves a config calls it. transformers never saves attn_implementation, and without it a saved "
        "model would be loaded with its pattern ignored (integration/saving.py)."
    ),
    "PreTrainedConfig._attn_implementation": (
        "The saved name, which transformers refuses if this package is not imported, becomes 'efficient' again "
        "(integration/saving.py)."
    ),
    "PreTrainedConfig._experts_implementation": "The same name is saved here, and ignored when it is loaded.",
    "PreTrainedConfig.to_json_file": (
        "Models, Trainer and PEFT all write config.json with it: the file that imports this package, or the copy of "
        "its sources, is saved next to it (hub/config_saving.py)."
    ),
    "CallbackHandler.on_push_begin": (
        "Trainer pushes a copy of a checkpoint's config without the code next to it. A default callback would be "
        "enough, but the list of these is in transformers.trainer, whose import takes seconds (hub/saving.py)."
    ),
    "_LazyModule.__getattr__": (
        "`transformers serve` and others find the classes of saved `architectures` as attributes of transformers "
        "(integration/saving.py)."
    ),
}
