"""Words and sentence patterns of the training prompts, written for this project."""

from __future__ import annotations

__all__ = [
    "ARTICLE_PATTERNS",
    "CHAT_PATTERNS",
    "CODE_PATTERNS",
    "CODE_TASKS",
    "FUNCTION_PATTERNS",
    "MATH_ENDINGS",
    "NAMES",
    "PASSAGE_PATTERNS",
    "THINGS",
    "TOPICS",
]

_TOPICS = """
    the water cycle|volcanoes|black holes|the immune system|photosynthesis|honey bees|coral reefs
    |the Roman Empire|the Silk Road|the French Revolution|the printing press
    |the Industrial Revolution
    |ancient Egypt|the Great Wall of China|the Renaissance|the Vikings|the Ottoman Empire
    |machine learning|public key encryption|databases|operating systems|web browsers|compilers
    |solar panels|wind turbines|electric cars|nuclear power|batteries|bridges|skyscrapers|trains
    |learning a new language|playing the piano|growing tomatoes|baking sourdough bread|making coffee
    |running a marathon|yoga|healthy sleep|managing stress|saving money|writing a resume
    |job interviews
    |public speaking|time management|remote work|teamwork|starting a small business|marketing
    |inflation|supply and demand|taxes|stock markets|insurance|renting a flat|buying a house
    |cats|dogs|elephants|whales|penguins|owls|spiders|dinosaurs|butterflies|mushrooms|oak trees
    |Paris|Tokyo|New York City|Istanbul|Cairo|Rio de Janeiro|Iceland|New Zealand
    |the Amazon rainforest
    |the Sahara desert|the Himalayas|the Mediterranean Sea|Antarctica|national parks|camping|hiking
    |chess|football|tennis|swimming|basketball|the Olympic Games|board games|video games|card tricks
    |jazz|classical music|film photography|watercolor painting|poetry|theater|science fiction
    |detective novels|fairy tales|mythology|philosophy|ethics|democracy|human rights|journalism
    |climate change|recycling|plastic pollution|drinking water|earthquakes|hurricanes|the weather
    |vaccines|antibiotics|vitamins|the human heart|the brain|genetics|evolution|the periodic table
    |gravity|magnetism|light|sound|atoms|the Moon|Mars|space telescopes|rockets|satellites
    |time zones
    |artificial intelligence in medicine|online privacy|passwords|social media|email|spreadsheets
    |cooking rice|pasta|spices|chocolate|cheese|tea|vegetarian food|street food|school lunches
    |homework|libraries|museums|teachers|friendship|family traditions|birthday parties|weddings
    |gardening|knitting|woodworking|bicycles|sailing|airplanes|maps|clocks|calendars|money|markets
"""

TOPICS: tuple[str, ...] = tuple(topic.strip() for topic in _TOPICS.split("|"))

_THINGS = """
    apples|books|pencils|marbles|cookies|tickets|stamps|chairs|bottles|eggs|oranges|shirts|coins
    |cards|flowers|boxes|candles|balloons|notebooks|sandwiches|bricks|seeds|photos|cups|keys
"""

THINGS: tuple[str, ...] = tuple(thing.strip() for thing in _THINGS.split("|"))

_NAMES = """
    Anna Ben Clara David Elif Farid Grace Hugo Ines Jonas Kira Liam Mona Nils Olga Pedro Rosa Sami
    Tara Umar Vera Will Yuki Zoe
"""

NAMES: tuple[str, ...] = tuple(_NAMES.split())

# Chat: open questions and writing tasks about {topic}.
CHAT_PATTERNS: tuple[str, ...] = (
    "What is the most interesting thing about {topic}?",
    "Explain {topic} to a ten-year-old.",
    "Explain {topic} in simple terms.",
    "Give me five facts about {topic}.",
    "What are the advantages and disadvantages of {topic}?",
    "Write a short story about {topic}.",
    "Write a story that begins with a rainy morning and has to do with {topic}.",
    "Write a poem about {topic}.",
    "Write a haiku about {topic}, then explain it.",
    "Write an email to my boss about {topic}.",
    "Write a polite letter to a neighbour about {topic}.",
    "Write a blog post about {topic} with a catchy title.",
    "Write a product description that has to do with {topic}.",
    "Write a dialogue between two friends about {topic}.",
    "Write a short speech about {topic} for a school event.",
    "How has {topic} changed over the last hundred years?",
    "What should a beginner know about {topic}?",
    "What are common mistakes that people make with {topic}?",
    "Make a list of ten tips about {topic}.",
    "Make a study plan for learning about {topic} in one week.",
    "Compare {topic} and {other}.",
    "What do {topic} and {other} have in common?",
    "Is {topic} more important than {other}? Give reasons.",
    "Imagine you are a teacher. Give a short lesson about {topic}.",
    "Pretend to be a historian and tell me about {topic}.",
    "You are a travel guide. Talk about {topic}.",
    "What would the world look like without {topic}?",
    "What questions should I ask an expert on {topic}?",
    "Write three quiz questions about {topic}, with answers.",
    "Write a table with three rows about {topic}.",
    "Give me a definition of {topic} and an example.",
    "Why do people like {topic}?",
    "Who are famous people connected with {topic}?",
    "Summarize what you know about {topic} in three sentences.",
    "Tell me a joke about {topic}.",
    "I want to write an essay about {topic}. Suggest an outline.",
    "Describe {topic} without using the word itself.",
    "What is the history of {topic}?",
    "How do {topic} affect our daily life?",
    "Translate the sentence 'I would like to know more about {topic}' into French and Spanish.",
    "Extract the main idea: people who know {topic} well often talk about {other} too.",
    "Rewrite this sentence in a formal style: hey, tell me what's up with {topic}!",
    "Which books would you recommend about {topic}?",
    "Answer in one paragraph: how does one get started with {topic}?",
)

# Articles: long connected prose, as in newspapers and encyclopedias.
ARTICLE_PATTERNS: tuple[str, ...] = (
    "Write a newspaper article about {topic}.",
    "Write a news report about an event that has to do with {topic} and {other}.",
    "Write an encyclopedia entry about {topic}.",
    "Write a detailed essay about {topic}.",
    "Report on the latest research about {topic} in the style of a newspaper.",
)

CODE_TASKS: tuple[str, ...] = (
    "returns the sum of the squares of a list of numbers",
    "checks whether a word is a palindrome",
    "counts the vowels in a string",
    "reverses the words of a sentence",
    "finds the second largest number in a list",
    "removes duplicates from a list and keeps the order",
    "merges two sorted lists into one sorted list",
    "computes the greatest common divisor of two numbers",
    "computes the first n Fibonacci numbers",
    "tests whether a number is prime",
    "returns all prime factors of an integer",
    "sorts a list with bubble sort",
    "sorts a list with quick sort",
    "searches a sorted list with binary search",
    "converts a decimal number to binary",
    "converts degrees Celsius to Fahrenheit",
    "counts how often each word occurs in a text",
    "finds the longest word in a sentence",
    "checks whether two strings are anagrams",
    "flattens a nested list",
    "transposes a matrix",
    "multiplies two matrices",
    "rotates a list by k places",
    "computes the average and the median of a list",
    "computes the factorial of n without recursion",
    "validates an email address",
    "parses a line of comma-separated values",
    "reads a text file and counts its lines",
    "writes a dictionary to a JSON file",
    "formats a number of seconds as hours, minutes and seconds",
    "generates a random password of a given length",
    "encrypts a message with the Caesar cipher",
    "checks whether brackets in a string are balanced",
    "removes all punctuation from a string",
    "capitalizes the first letter of every word",
    "finds the common elements of two lists",
    "splits a list into chunks of a given size",
    "returns the n-th row of Pascal's triangle",
    "computes the distance between two points",
    "computes compound interest",
    "checks whether a year is a leap year",
    "returns the day of the week of a date",
    "inserts a value into a binary search tree",
    "reverses a linked list",
    "implements a stack with push and pop",
    "implements a queue with two stacks",
    "counts the number of islands in a grid",
    "finds the shortest path in a graph with breadth-first search",
    "computes the edit distance of two strings",
    "finds the longest common prefix of a list of strings",
    "returns all permutations of a list",
    "returns all subsets of a set",
    "solves the towers of Hanoi",
    "prints a multiplication table",
    "simulates rolling two dice",
    "plays rock, paper, scissors against the computer",
    "downloads a web page and prints its title",
    "groups a list of dictionaries by a key",
    "filters the even numbers out of a list",
    "checks whether a list is sorted",
)

CODE_PATTERNS: tuple[str, ...] = (
    "Write a Python function that {task}.",
    "Write a Python function that {task}. Explain how it works.",
    "Write a Python function that {task}, with a docstring and type hints.",
    "Write a Python program that {task} and show an example of its use.",
    "Write a class in Python with a method that {task}.",
    "Write a JavaScript function that {task}.",
    "Write a C++ program that {task}.",
    "Write a unit test for a Python function that {task}.",
    "How can I write code that {task}? What is its time complexity?",
)

# {code}: the signature and docstring of a function of the standard library, or all of it.
FUNCTION_PATTERNS: tuple[tuple[str, bool], ...] = (
    ("Finish this Python function:\n\n```python\n{code}\n```", False),
    ("Please implement the function below.\n\n```python\n{code}\n```", False),
    ("{code}", False),
    ("Here is the start of a function. Write the body.\n\n{code}", False),
    ("What does this code do?\n\n```python\n{code}\n```", True),
    ("Rewrite this function with comments:\n\n```python\n{code}\n```", True),
    ("Find possible errors in this code and suggest a fix.\n\n```python\n{code}\n```", True),
    ("Write a test for this function:\n\n```python\n{code}\n```", True),
)

PASSAGE_PATTERNS: tuple[str, ...] = (
    "Summarize this text:\n\n{passage}",
    "Read the text and give its main points.\n\n{passage}",
    "{passage}\n\nWhat is the text above about?",
    "{passage}\n\nRepeat the most important sentence of the text and say why it matters.",
    "Text:\n\n{passage}\n\nAnswer with a sentence from the text: {question}",
    "Write a shorter version of the following text.\n\n{passage}",
    "Make a bullet list out of this text.\n\n{passage}",
)

MATH_ENDINGS: tuple[str, ...] = (
    "",
    " Explain your answer.",
    " Show your work.",
    " Think it through and give the final number.",
    " Write down each step of the calculation.",
)
