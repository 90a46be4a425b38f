"""A built-in set of queries and passages: what a quantized model is compared with its source on.

Written for minice, so that no test collection is used up by looking at it. For each query the first passage
answers it, the second and third are near, and the rest are about something else.
"""

from typing import Final

SAMPLE_PAIRS: Final[tuple[tuple[str, tuple[str, ...]], ...]] = (
    (
        "how do I undo the last commit",
        (
            "To take back the newest commit but keep its changes in the working tree, run git reset --soft HEAD~1.",
            "git stash puts uncommitted work aside and brings it back with git stash pop.",
            "A commit message starts with one short line in the imperative, then an empty line, then the reasons.",
            "Sourdough needs a starter that has been fed the evening before.",
            "The ferry to the island leaves every two hours and takes bicycles free of charge.",
            "Our landlord raised the rent by four percent from January on.",
        ),
    ),
    (
        "when is Maria's birthday",
        (
            "Maria told me at lunch that she turns forty on the ninth of May and wants no presents.",
            "We gave Maria a fountain pen when she left the department.",
            "The birthday party of the twins was moved to the garden because of the heat.",
            "Backups run every night at two and are kept for thirty days.",
            "The recipe calls for two cloves of garlic and a glass of white wine.",
            "Use the side entrance after eight in the evening.",
        ),
    ),
    (
        "why does the boiler lose pressure",
        (
            "If the gauge drops again within a day, the expansion vessel has lost its air or a joint is leaking.",
            "The plumber bled all radiators and topped up the heating circuit to 1.5 bar.",
            "Tyre pressure should be checked when the tyres are cold.",
            "The concert was sold out within minutes.",
            "A hash table finds a key in constant time on average.",
            "She prefers the window seat on long flights.",
        ),
    ),
    (
        "capital of Australia",
        (
            "Canberra was chosen as the seat of government in 1908, as a compromise between Sydney and Melbourne.",
            "Sydney is the largest city of Australia and known for its opera house and harbour.",
            "The capital gains of the fund are paid out once a year.",
            "Vienna has been named the most liveable city several times.",
            "Kangaroos can cover nine metres in one jump.",
            "The printer on the third floor is out of toner.",
        ),
    ),
    (
        "what did the doctor say about my knee",
        (
            "After the scan Dr. Lindqvist said the meniscus is torn but needs no operation, only physiotherapy.",
            "My knee started to hurt after the half marathon in October.",
            "The doctor's practice is closed during the first two weeks of August.",
            "The knee joint of the robot arm has two degrees of freedom.",
            "Please send the invoice to the new address.",
            "Leave the dough to rest for an hour in a warm place.",
        ),
    ),
    (
        "python read a file line by line",
        (
            "Open the file in a with statement and loop over it: for line in file yields one line at a time, so even "
            "large files need little memory.",
            "pathlib.Path.write_text replaces the whole content of a file with a string.",
            "The reticulated python is the longest snake in the world.",
            "In a queue at the post office I read the newspaper from front to back.",
            "The museum is closed on Mondays.",
            "Two of the three applicants withdrew before the interview.",
        ),
    ),
    (
        "which wine goes with fish",
        (
            "A dry white such as Chablis or Albariño is the safe choice with most fish; with salmon a light red works.",
            "We drank the last bottle of the 2015 Barolo with the roast.",
            "The fish market opens at five and is worth getting up for.",
            "The train was forty minutes late because of a signal failure.",
            "Quarterly figures are due on the tenth working day.",
            "Her thesis is about the migration of storks.",
        ),
    ),
    (
        "decision about the database migration",
        (
            "In the meeting on Tuesday we decided to move to PostgreSQL 16 in March and to freeze the schema a week "
            "before.",
            "The database server ran out of disk space twice last month.",
            "Bird migration starts earlier each year.",
            "He bought the blue jacket after all.",
            "To descale the kettle, boil water with two spoons of citric acid.",
            "",
        ),
    ),
)
