"""What all kinds of reports share: findings, documents, wording, output forms and plot style."""
