"""The documented rules of the Hub for the YAML of model cards, as far as they can be checked here.

Checked: the block is there and is a mapping; licenses by the Hub's list; languages as codes of two or three letters,
with a region or script, or special names; tags, datasets, metrics and base models as a name or a list of names;
the tasks of pipelines that transformers knows; and of `model-index` every field that is required. Not checked: whether
datasets and base models exist, which the Hub looks up, nor what its server does not document.
"""

import re
from collections.abc import Iterator
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from transformers.pipelines import SUPPORTED_TASKS

LICENSES = re.findall(
    r"\S+",
    """
    apache-2.0 mit openrail bigscience-openrail-m creativeml-openrail-m bigscience-bloom-rail-1.0 bigcode-openrail-m
    afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear c-uda cc cc0-1.0 cc-by-2.0
    cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0 cc-by-nc-4.0 cc-by-nd-4.0
    cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0 cdla-sharing-1.0
    cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 agpl-3.0 gfdl gpl
    gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 isc lppl-1.3c ms-pl mpl-2.0 odc-by odbl openrail++ osl-3.0 postgresql
    ofl-1.1 ncsa unlicense zlib pddl lgpl-lr deepfloyd-if-license llama2 gemma unknown other
    """,
)
LANGUAGE = re.compile(r"[a-z]{2,3}(-[A-Za-z]{2,4})?|code|multilingual")
LISTS = ("tags", "datasets", "metrics", "base_model")
NAMES = ("library_name", "pipeline_tag", "license_name", "license_link", "model_name")
# of each result: its part, and what that part must have
REQUIRED = {"task": ("type",), "dataset": ("type", "name")}


def card_errors(content: str) -> list[str]:
    """Return what is wrong with the metadata of a card, in sentences; none: it may be pushed."""
    block = REGEX_YAML_BLOCK.search(content)
    if block is None:
        return ["The card has no YAML block."]
    try:
        data = yaml.safe_load(block.group(2))
    except yaml.YAMLError as error:
        return [f"The YAML cannot be read: {error}"]
    return list(_errors(data)) if isinstance(data, dict) else ["The YAML block is no mapping."]


def _errors(data: dict[str, Any]) -> Iterator[str]:
    for name in LISTS:
        if not all(isinstance(each, str) and each for each in _listed(data.get(name))):
            yield f"{name} must be a name or a list of names."
    for name in NAMES:
        if not isinstance(data.get(name, ""), str):
            yield f"{name} must be a name."
    if not all(isinstance(each, str) and LANGUAGE.fullmatch(each) for each in _listed(data.get("language"))):
        yield f"language={data['language']} must be codes of ISO 639."
    unknown = [each for each in _listed(data.get("license")) if each not in LICENSES]
    if unknown:
        yield f"license={unknown} is not one of the Hub's."
    if data.get("license") == "other" and not data.get("license_name"):
        yield "license: other needs a license_name."
    task = data.get("pipeline_tag")
    if task is not None and task not in SUPPORTED_TASKS and task != "multiple-choice":
        yield f"pipeline_tag={task} is no task of transformers."
    yield from _index_errors(data.get("model-index"))


def _index_errors(index: Any) -> Iterator[str]:
    if index is None:
        return
    if not isinstance(index, list) or not index:
        yield "model-index must be a list of models."
        return
    for model in index:
        if (
            not isinstance(model, dict)
            or not isinstance(model.get("name"), str)
            or not isinstance(model["results"], list)
        ):
            yield "Each model of model-index needs a name and a list of results."
            continue
        for result in model["results"]:
            yield from _result_errors(result)


def _result_errors(result: dict[str, Any]) -> Iterator[str]:
    for part, fields in REQUIRED.items():
        for field in fields:
            if not isinstance((result.get(part) or {}).get(field), str):
                yield f"A result of model-index needs {part}.{field}."
    metrics = result.get("metrics")
    if not isinstance(metrics, list) or not metrics:
        yield "A result of model-index needs metrics."
    for metric in metrics or ():
        if not isinstance(metric.get("type"), str) or "value" not in metric:
            yield "A metric of model-index needs a type and a value."


def _listed(value: Any) -> list[Any]:
    return [] if value is None else value if isinstance(value, list) else [value]
