from setuptools import setup
from configparser import ConfigParser
from pathlib import Path

cp = ConfigParser(delimiters=['=']); cp.read(Path(__file__).parent/'settings.ini', encoding='utf-8')
cfg = cp['DEFAULT']

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], keywords=cfg['keywords'].split(),
    author=cfg['author'], url=cfg['git_url'], license='Apache-2.0',
    long_description=Path(__file__).with_name('README.md').read_text(encoding='utf-8'), long_description_content_type='text/markdown',
    # by name: find_packages misses litevllm.kernels, which is a link and has no __init__.py (tests/test_packaging.py counts them)
    packages=['litevllm'] + [f'litevllm.{p}' for p in ('bench', 'core', 'engine', 'kernels', 'model', 'worker')],
    install_requires=cfg['requirements'].splitlines(),   # one requirement a line: markers hold spaces
    extras_require={'dev': cfg['dev_requirements'].splitlines()},
    python_requires='>='+cfg['min_python'],
    entry_points={'nbdev': [f"{cfg['lib_path']}={cfg['lib_path']}._modidx:d"]},
    zip_safe=False)
