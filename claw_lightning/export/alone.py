"""Play an exported policy with numpy and onnxruntime, or numpy and torch: a program of its own, without this package.

    python -I -S alone.py POLICY INPUTS.npz OUTPUTS.npz FOLDER [FOLDER ...]

Started so, an interpreter has neither site-packages nor a working directory on its path; the folders are added to it.
Imports of the training side are refused whatever lies in them.

INPUTS.npz holds each input for T calls, [T, N, ...]; of those that come out of the call before, what the first call is
given, [N]. OUTPUTS.npz gets all outputs, [T, N, ...], and once more under ``alone_<name>``, [T, 1, ...], those of lane
0 played by itself. The last line of standard output is JSON: ``metadata`` of the file and ``refused``, the modules of
:data:`REFUSED` in memory.
"""

import json
import sys

#: Modules that a file must not need.
REFUSED = ["claw_lightning", "callbacks", "lightning", "pytorch_lightning"]
#: Input of a call: output of the one before.
KEPT = {"option": "next_option", "steps": "next_steps"}


class Refusal:
    """Finder in front of all others."""

    def find_spec(self, name, path=None, target=None):
        """Refuse by raising; None lets the next finder try."""
        if name.partition(".")[0] in REFUSED:
            raise ImportError(f"{name} must not be needed")
        return None


def load_onnx(path):
    """A call that takes and gives dictionaries of arrays, and the metadata."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = session.get_modelmeta().custom_metadata_map

    def call(inputs):
        return dict(zip(names, session.run(names, inputs), strict=True))

    return call, {name: json.loads(value) for name, value in found.items()}


def load_torch(path):
    """The same for torch.export's format."""
    import torch

    extra = {"metadata.json": ""}
    torch.set_num_threads(1)
    policy = torch.export.load(path, extra_files=extra).module()

    def call(inputs):
        with torch.no_grad():
            found = policy(**{name: torch.from_numpy(value) for name, value in inputs.items()})
        return {name: value.numpy() for name, value in found.items()}

    return call, json.loads(extra["metadata.json"])


def play(call, inputs):
    """All calls in order; what comes out of one goes into the next: [T, N, ...] -> [T, N, ...]."""
    import numpy as np

    kept = {name: value for name, value in inputs.items() if name in KEPT}
    given = {name: value for name, value in inputs.items() if name not in KEPT}
    outputs = []
    for t in range(len(next(iter(given.values())))):
        found = call({**{name: value[t] for name, value in given.items()}, **kept})
        kept = {name: found[KEPT[name]] for name in kept}
        outputs.append(found)
    return {name: np.stack([each[name] for each in outputs]) for name in outputs[0]}


def main(policy, inputs_file, outputs_file, *folders):
    """Play the file twice: all lanes at once, and lane 0 by itself."""
    sys.meta_path.insert(0, Refusal())
    if not policy.endswith(".pt2"):
        REFUSED.append("torch")
    sys.path[:0] = folders
    import numpy as np

    with np.load(inputs_file) as content:
        inputs = {name: content[name] for name in content.files}
    call, metadata = (load_torch if policy.endswith(".pt2") else load_onnx)(policy)
    outputs = play(call, inputs)
    lane = {name: value[:1] if name in KEPT else np.ascontiguousarray(value[:, :1]) for name, value in inputs.items()}
    alone = play(call, lane)
    np.savez(outputs_file, **outputs, **{f"alone_{name}": value for name, value in alone.items()})
    refused = sorted(name for name in sys.modules if name.partition(".")[0] in REFUSED)
    print(json.dumps({"metadata": metadata, "refused": refused}))


if __name__ == "__main__":
    main(*sys.argv[1:])
