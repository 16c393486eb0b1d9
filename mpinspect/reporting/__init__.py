"""What a report says and how it is shown, whatever its question: findings, words, pages, pictures' style."""
