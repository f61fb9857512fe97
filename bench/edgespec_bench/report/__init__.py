"""Reports made from a run's rows alone: figures, the table of targets, Markdown, plots, HTML, the README's part."""
