"""How well questions are answered, in all and by where the answer stands."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evaluate
import torch
from shared.token_batches import pad_batch, token_batches
from transformers import PreTrainedModel

from question_answering.questions import Question, best_answer

METRIC = Path(__file__).parents[1] / "metrics" / "squad_scores"
FIRST_BORDER = 512


@torch.no_grad()
def answer(
    model: PreTrainedModel, questions: Sequence[Question], tokens_per_batch: int, max_answer_tokens: int
) -> tuple[list[str], float]:
    """Return the model's answers, in the order of the questions, and the seconds they took."""
    model.eval()
    start = time.perf_counter()
    lengths = [len(question.input_ids) for question in questions]
    answers = [""] * len(questions)
    for batch in token_batches(sorted(range(len(lengths)), key=lengths.__getitem__), lengths, tokens_per_batch):
        padded = pad_batch([questions[index].inputs() for index in batch], model.config.pad_token_id)
        outputs = model(**{name: tensor.to(model.device) for name, tensor in padded.items()})
        logits = zip(outputs.start_logits.float().cpu().numpy(), outputs.end_logits.float().cpu().numpy(), strict=True)
        for index, (starts, ends) in zip(batch, logits, strict=True):
            answers[index] = best_answer(questions[index], starts, ends, max_answer_tokens)
    return answers, time.perf_counter() - start


def score(answers: Sequence[str], questions: Sequence[Question]) -> dict[str, float]:
    """Return exact match and F1, 0 to 100, and the number of questions."""
    references = [question.answers for question in questions]
    scores = evaluate.load(str(METRIC)).compute(predictions=list(answers), references=references)
    return {**scores, "questions": len(questions)}


def score_by_position(answers: Sequence[str], questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Return the scores of questions whose answer begins before token 512, from there to 1,024, to 2,048, and so on.

    Args:
        questions: untruncated, so that every answer has its place.
    """
    found = []
    begin, end = 0, FIRST_BORDER
    while any(question.answer_at is not None and question.answer_at >= begin for question in questions):
        inside = [
            (said, question)
            for said, question in zip(answers, questions, strict=True)
            if question.answer_at is not None and begin <= question.answer_at < end
        ]
        if inside:
            found.append({"begin": begin, "end": end, **score(*zip(*inside, strict=True))})
        begin, end = end, 2 * end
    return found
