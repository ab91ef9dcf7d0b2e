"""What Python's huggingface_hub makes of a cache, as JSON on stdout.

usage: interop.py pull CACHE REPO [--no-symlinks]   download what inference needs
       interop.py read CACHE REPO                   read it without network
       interop.py remove CACHE REPO COMMIT          delete one revision
The endpoint comes from HF_ENDPOINT.
"""

import json
import os
import sys

verb, cache, repo = sys.argv[1:4]
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["HF_HUB_DISABLE_XET"] = "1"
if "--no-symlinks" in sys.argv:
    os.environ["HF_HUB_DISABLE_SYMLINKS"] = "1"

import huggingface_hub as hub  # noqa: E402

if verb == "pull":
    folder = hub.snapshot_download(
        repo,
        cache_dir=cache,
        allow_patterns=["*.json", "*.jinja", "model*.safetensors"],
    )
    print(json.dumps({"folder": folder}))
elif verb == "read":
    folder = hub.snapshot_download(repo, cache_dir=cache, local_files_only=True)
    scan = hub.scan_cache_dir(cache)
    known = hub.try_to_load_from_cache(repo, "chat_template.jinja", cache_dir=cache)
    print(
        json.dumps(
            {
                "folder": folder,
                "config": hub.hf_hub_download(repo, "config.json", cache_dir=cache, local_files_only=True),
                "absence_known": known is hub._CACHED_NO_EXIST,
                "warnings": [str(w) for w in scan.warnings],
                "repos": [
                    {
                        "id": r.repo_id,
                        "size": r.size_on_disk,
                        "refs": sorted(r.refs),
                        "commits": sorted(v.commit_hash for v in r.revisions),
                        "files": sorted(f.file_name for v in r.revisions for f in v.files),
                    }
                    for r in scan.repos
                ],
            }
        )
    )
elif verb == "remove":
    hub.scan_cache_dir(cache).delete_revisions(sys.argv[4]).execute()
    print("{}")
