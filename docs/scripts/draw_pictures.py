"""Draws docs/assets/pictures/ from the library's own schedules, traces and tables, in English and in Chinese.

    python docs/scripts/draw_pictures.py

Each picture is a module of ``pictures``. A test holds the files to what is drawn.
"""

from __future__ import annotations

from pictures import FOLDER, NAMES, files

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in NAMES:
        for file, content in files(name).items():
            (FOLDER / file).write_text(content)
