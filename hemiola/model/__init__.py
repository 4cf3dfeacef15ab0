"""The Nemotron-H model: mixers that project, call ops and project back. It knows no arm, no cache policy, no text."""
