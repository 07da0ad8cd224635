"""Text to SQL under a Lark grammar of one table: every text parses, runs, and the weights undo what the masks did."""

import math
import sqlite3

import smcdecode as smc

SCHEMA = "CREATE TABLE employees (name TEXT, city TEXT, age INTEGER, salary INTEGER)"
PROMPT = f"""{SCHEMA};
Question: How many employees are older than 40?
SQL: SELECT COUNT(*) FROM employees WHERE age > 40;
Question: What are the names of the employees who earn less than 3000?
SQL: SELECT name FROM employees WHERE salary < 3000;
Question: Who lives in Rome?
SQL: SELECT name FROM employees WHERE city = 'Rome';
Question: Who lives in Paris?
SQL:"""

SQL = r"""
    start: " SELECT " columns " FROM employees" where? order? ";"
    columns: "*" | "COUNT(*)" | COLUMN (", " COLUMN)*
    where: " WHERE " condition (" AND " condition)*
    condition: TEXT_COLUMN " = " STRING | NUMBER_COLUMN COMPARISON NUMBER
    order: " ORDER BY " COLUMN (" ASC" | " DESC")?
    COLUMN: TEXT_COLUMN | NUMBER_COLUMN
    TEXT_COLUMN: "name" | "city"
    NUMBER_COLUMN: "age" | "salary"
    COMPARISON: " = " | " < " | " > "
    STRING: /'[A-Za-z ]{1,20}'/
    NUMBER: /[1-9][0-9]{0,4}/
"""


def database() -> sqlite3.Connection:
    """A table to ask."""
    connection = sqlite3.connect(":memory:")
    connection.execute(SCHEMA)
    rows = [("Ann", "Paris", 51, 2900), ("Ben", "Rome", 44, 4100), ("Cleo", "Paris", 29, 3300)]
    connection.executemany("INSERT INTO employees VALUES (?, ?, ?, ?)", rows)
    return connection


def main():
    """Ask a question in words, and the answer of every query that the model thinks likely."""
    p = smc.load("demo")
    out = smc.sample(p * smc.Grammar(SQL), PROMPT, method=smc.SMC(particles=8), max_tokens=32, seed=0)
    print(out.summary())

    table = database()
    for query, weight in out.distribution().items():
        answer = table.execute(query).fetchall()  # never a syntax error, never an unknown column
        print(f"{weight:.3f}{query}  →  {answer}")
    print(f"p writes such a query with probability {math.exp(out.log_z):.3g}")
    assert out.alive and out.log_z <= 0


if __name__ == "__main__":
    main()
