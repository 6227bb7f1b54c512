#!/usr/bin/env python3
"""Models between the worker and transformers: what the worker has trained is loaded there
and computes the same, what transformers has saved is trained on from the same numbers.

    export.py EXAMPLES WORK     the worker lies beside EXAMPLES, WORK is an empty directory

Trainings are of two processes on this machine. Losses and gradient norms are the worker's
own, of its sharded state, not of what it exported.
"""

import json
import math
import os
import pathlib
import shutil
import socket
import subprocess
import sys

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")

import numpy
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

transformers.utils.logging.disable_progress_bar()

# Of loss and gradient norm, in f32.
TOLERANCE = 1e-4
SEQUENCE, BATCH, STEPS = 48, 6, 12

FIXTURE = pathlib.Path(__file__).resolve().parent.parent / "fixtures" / "tokenizer"
TEXT = FIXTURE / "text.txt"

LLAMA = {
    "model_type": "llama",
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 88,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "num_attention_heads": 4,
    # Not hidden_size / heads.
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Name, shape, which tokenizer, numbers of the export.
TRAINED = [
    ("llama-tied", LLAMA | {"tie_word_embeddings": True, "rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE}, "bytes", "f32"),
    ("llama-untied", LLAMA | {"tie_word_embeddings": False}, "tokenizer", "f32"),
    ("qwen3-tied", QWEN3 | {"tie_word_embeddings": True}, "bare tokenizer", "f32"),
    ("qwen3-untied", QWEN3 | {"tie_word_embeddings": False}, "bytes", "bf16"),
]
VOCABULARY = {"bytes": 257, "tokenizer": 600, "bare tokenizer": 600}
# The id after each document.
END = {"bytes": 256, "tokenizer": 1, "bare tokenizer": 0}


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Worker:
    def __init__(self, examples, work):
        self.program = pathlib.Path(examples).resolve().parent / "palingenesis-worker"
        self.work = pathlib.Path(work).resolve() / "models"
        self.work.mkdir()

    def prepare(self, kind):
        """Data made with one of the tokenizers."""
        data = self.work / f"data-{kind.replace(' ', '-')}"
        if not data.exists():
            own = self.work / kind.replace(" ", "-")
            if kind == "tokenizer":
                whole = PreTrainedTokenizerFast(tokenizer_file=str(FIXTURE / "tokenizer.json"), eos_token="<|im_end|>")
                whole.save_pretrained(own)
            elif kind == "bare tokenizer":
                # Nothing beside it says of which class it is.
                own.mkdir()
                shutil.copy(FIXTURE / "tokenizer.json", own)
            how = {"bytes": ["--bytes"], "tokenizer": ["--tokenizer", own]}
            how["bare tokenizer"] = ["--tokenizer", own / "tokenizer.json", "--eos", "<|endoftext|>"]
            subprocess.run([self.program, "prepare", *how[kind], "--out", data, TEXT], check=True, stdout=subprocess.DEVNULL)
        return data

    def train(self, output, data, model, *more, ranks=2):
        """A training from its start to its end; gives the last step's line of metrics.jsonl."""
        config = output.with_suffix(".toml")
        config.write_text(
            f"[data]\npath = \"{data}\"\nshuffle = false\n"
            f"[train]\noutput_dir = \"{output}\"\nseq_len = {SEQUENCE}\nglobal_batch_size = {BATCH}\nmicro_batch_size = 2\n"
            "log_every = 1\nthreads = 1\n[checkpoint]\nevery = 0\n"
        )
        port = str(free_port())
        place = lambda rank: {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "PALINGENESIS_LAUNCH_ID": "interop",
        }
        command = [self.program, config, *model, *more]
        started = [
            subprocess.Popen(command, env=os.environ | place(rank), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        try:
            said = [process.communicate(timeout=120)[1] for process in started]
        finally:
            for process in started:
                process.kill()
        codes = [process.returncode for process in started]
        assert codes == [0] * ranks, f"{command} ended with {codes}:\n{said[0]}"
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if line["event"] == "step"][-1]


def tokens(data):
    """The shards' ids: 256 numbers of 32 bits, then ids of 16."""
    about = json.loads((data / "data.json").read_text())
    return numpy.concatenate([numpy.fromfile(data / shard["file"], "<u2", offset=1024) for shard in about["shards"]])


def batch(data, step):
    """Inputs and targets of a step, which are the sequences as they lie on disk."""
    ids = torch.from_numpy(tokens(data).astype(numpy.int64))
    sequences = (len(ids) - 1) // SEQUENCE
    cut = [ids[at * SEQUENCE : (at + 1) * SEQUENCE + 1] for at in ((step * BATCH + i) % sequences for i in range(BATCH))]
    rows = torch.stack(cut)
    return rows[:, :-1], rows[:, 1:]


def shape_arguments(shape, vocabulary):
    return [f"model.shape.{key}={json.dumps(value) if isinstance(value, (dict, bool)) else value}"
            for key, value in (shape | {"vocab_size": vocabulary}).items()]


def load(directory, **more):
    """As anybody does it, with nothing missing and nothing left over."""
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True, **more)
    for what, names in info.items():
        assert not names, f"{directory}: {what}: {names}"
    return model.eval()


def near(ours, theirs, what):
    assert math.isclose(ours, theirs, rel_tol=TOLERANCE), f"{what}: the worker has {ours}, transformers {theirs}"


def compare(step, model, data, index, what):
    """The worker's loss and gradient norm of a step against transformers' with this model."""
    inputs, targets = batch(data, index)
    model.zero_grad()
    logits = model(inputs).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    norm = math.sqrt(sum(float(tensor.grad.double().pow(2).sum()) for tensor in model.parameters()))
    assert step["step"] == index + 1, step
    near(step["loss"], loss.item(), f"{what}: loss")
    near(step["grad_norm"], norm, f"{what}: gradient norm")
    return loss.item()


def same_numbers(one, other, what, dtype=None):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys(), f"{what}: {one.keys() ^ other.keys()}"
    for name, tensor in one.items():
        assert torch.equal(tensor if dtype is None else tensor.to(dtype), other[name]), f"{what}: {name} has other numbers"


def tokenizer_of(final, data, kind):
    """The exported tokenizer gives the ids that were trained on, and text back."""
    tokenizer = AutoTokenizer.from_pretrained(final)
    text = TEXT.read_bytes().decode()
    # What looks like a special token is text in text.
    ids = tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert ids + [END[kind]] == tokens(data).tolist(), f"{final}: the tokenizer gives other ids than prepare"
    assert tokenizer.eos_token_id == END[kind], tokenizer.eos_token_id
    if kind != "bytes":
        assert tokenizer.decode(ids) == text, f"{final}: the ids do not give the text back"


def trained(worker, name, shape, kind, dtype):
    data, output = worker.prepare(kind), worker.work / name
    model = shape_arguments(shape, VOCABULARY[kind])
    worker.train(output, data, model, f"train.steps={STEPS}", "train.lr=3e-3", f"checkpoint.export_dtype={dtype}")
    final = worker.work / f"{name}-final"
    (output / "final").rename(final)
    # What the sharded training computes next.
    step = worker.train(output, data, model, f"train.steps={STEPS + 1}", "train.lr=3e-3")

    loaded = load(final)
    wanted = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    types = {tensor.dtype for tensor in loaded.parameters()}
    assert loaded.dtype == wanted and types == {wanted}, (loaded.dtype, types)
    config = loaded.config
    assert (config.bos_token_id, config.eos_token_id) == (None, END[kind]), config
    if dtype == "f32":
        loss = compare(step, loaded, data, STEPS, name)
        assert loss < math.log(VOCABULARY[kind]) - 0.5, f"{name}: it has learnt nothing: loss {loss}"
    else:
        # Rounded weights have another loss: the f32 ones of the same step have none.
        worker.train(output.with_name("again"), data, model, f"train.steps={STEPS}", "train.lr=3e-3")
        exact = load(worker.work / "again" / "final")
        compare(step, exact, data, STEPS, name)
        same_numbers(exact, loaded, name, torch.bfloat16)
    # From config.json alone follows when to stop.
    assert loaded.generation_config.eos_token_id == END[kind], loaded.generation_config
    prompt = batch(data, 0)[0][:1, :8]
    length = loaded.generate(prompt, max_new_tokens=8, do_sample=False).shape[1]
    assert 8 < length <= 16, length
    tokenizer_of(final, data, kind)


def imported(worker, name, shape, kind, dtype):
    """What save_pretrained has written in many files, trained on and exported again."""
    data, source = worker.prepare(kind), worker.work / f"{name}-source"
    torch.manual_seed(7)
    meanings = {"bos_token_id": 7, "eos_token_id": [5, 9], "pad_token_id": 3}
    config = AutoConfig.for_model(**shape, vocab_size=VOCABULARY[kind], **meanings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for tensor in model.parameters():
            # Norms are ones at first, and matrices too small to matter.
            tensor.add_(torch.randn_like(tensor) * 0.1)
    model = model.to(dtype).eval()
    model.generation_config.temperature = 0.6
    model.generation_config.do_sample = True
    model.save_pretrained(source, max_shard_size="40KB")
    assert len(list(source.glob("model-*.safetensors"))) > 3 and (source / "model.safetensors.index.json").exists()

    output = worker.work / name
    numbers = {torch.float32: "f32", torch.bfloat16: "bf16"}[dtype]
    # With a learning rate of 0 the weights come out as they went in.
    step = worker.train(output, data, [f"model.path={source}"], "train.steps=1", "train.lr=0", f"checkpoint.export_dtype={numbers}")
    again = load(output / "final")
    assert again.dtype == dtype, again.dtype
    same_numbers(model, again, name)
    for key, value in meanings.items():
        assert getattr(again.config, key) == value, (key, again.config)
    assert again.generation_config.temperature == 0.6, again.generation_config
    assert again.generation_config.eos_token_id == [5, 9], again.generation_config
    # Not model.float(): its table of rotary frequencies was rounded with the weights.
    compare(step, load(source, dtype=torch.float32), data, 0, name)


def main():
    worker = Worker(*sys.argv[1:])
    for name, shape, kind, dtype in TRAINED:
        trained(worker, name, shape, kind, dtype)
    print(f"transformers {transformers.__version__} loads {', '.join(case[0] for case in TRAINED)}: the same loss and gradient")
    cases = [(f"from-{name}", shape, kind) for name, shape, kind, _ in TRAINED]
    for (name, shape, kind), dtype in zip(cases, [torch.float32, torch.bfloat16, torch.bfloat16, torch.float32]):
        imported(worker, name, shape, kind, dtype)
    print("the worker goes on with what transformers has saved in several files: the same loss and gradient")


if __name__ == "__main__":
    main()
