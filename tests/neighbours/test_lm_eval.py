"""lm-eval: `python -m hf_efficient_attn.lm_eval` evaluates saved folders, without any trust in remote code."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from families import WRITERS
from neighbours.saved_models import save_model

pytest.importorskip("lm_eval")
TEXTS = ["w1 w2 w3 w4 w5", "w9 w8 w7 w6 w5 w4 w3"]
TASKS = {
    "words": """\
task: words
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_target: "{{text}}"
doc_to_text: ""
metric_list: [{metric: word_perplexity}]
""",
    "choices": """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: ["w1", "w2"]
doc_to_target: 0
metric_list: [{metric: acc}]
""",
    "answers": """\
task: answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "w1"
generation_kwargs: {until: ["w2"], max_gen_toks: 4, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.mark.parametrize("family", WRITERS)
def test_likelihoods_choices_and_generation(family: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", WRITERS[family])
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    for name, task in TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(task.replace("DATA", str(tmp_path / "texts.jsonl")))
    model_args = f"pretrained={tmp_path / 'model'},dtype=float32"
    words = ["--model", "hf", "--model_args", model_args, "--device", "cpu"]
    words += ["--tasks", ",".join(TASKS), "--include_path", str(tmp_path), "--batch_size", "2"]
    words += ["--output_path", str(tmp_path / "out")]
    done = subprocess.run(
        [sys.executable, "-m", "hf_efficient_attn.lm_eval", *words], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())["results"]
    assert results["words"]["word_perplexity,none"] == pytest.approx(perplexity(model), rel=1e-4)
    assert 0 <= results["choices"]["acc,none"] <= 1
    assert 0 <= results["answers"]["exact_match,none"] <= 1


def perplexity(model: Any) -> float:
    """Return the perplexity of a word, each a token, of which the first follows the token that begins texts.

    An encoder reads nothing but that token, and the tokenizer of an encoder-decoder writes the end of a text, too.
    """
    total, count = 0.0, 0
    begin = torch.tensor([[model.config.bos_token_id]])
    for text in TEXTS:
        words = [int(word[1:]) + 5 for word in text.split()]
        count += len(words)
        with torch.no_grad():
            if model.config.is_encoder_decoder:
                words.append(model.config.eos_token_id)
                logits = model(begin, labels=torch.tensor([words])).logits
            else:
                logits = model(torch.cat([begin, torch.tensor([words])], 1)).logits[:, :-1]
        total += logits.log_softmax(-1)[0].gather(1, torch.tensor(words)[:, None]).sum().item()
    return math.exp(-total / count)
