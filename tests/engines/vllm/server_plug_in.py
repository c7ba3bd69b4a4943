"""Plug-ins of vLLM that tests give to a server: modules beside this one."""

import os
from pathlib import Path

#: The variable that names the folder of a server's files.
FOLDER = "FOLDER_OF_SERVER"


def environment(folder: Path, module: str) -> dict[str, str]:
    """Write the entry point of `module.register` below `folder`; the variables that vLLM needs.

    vLLM calls it in each of its processes.
    """
    info = folder / f"{module}-0.0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.0.0\n")
    entry = f"[vllm.general_plugins]\n{module} = {module}:register\n"
    (info / "entry_points.txt").write_text(entry)
    folders = (str(folder), str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    path = os.pathsep.join(filter(None, folders))
    return {"PYTHONPATH": path, "VLLM_PLUGINS": f"picbench,{module}", FOLDER: str(folder)}
