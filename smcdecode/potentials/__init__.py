"""What a text is worth: potentials Ψ, one kind a file, and the vocabulary that lets them read tokens as bytes."""
