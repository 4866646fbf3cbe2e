"""One mesh of processes for all models that a script loads."""

import functools

from torch import distributed


def share_meshes() -> None:
    """Let models that are loaded in parts share their meshes.

    transformers makes two for each model, and with them six groups of processes, of three threads each, which nothing
    ends: after thirty models, five hundred threads look for work.
    """
    distributed.init_device_mesh = functools.cache(distributed.init_device_mesh)
